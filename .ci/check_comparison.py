"""Check the JSON of `looped-spec generate --compare`. Usage: check_comparison.py FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

document = json.loads(Path(sys.argv[1]).read_text())
assert document["identical"] is True, document["first_difference"]
assert document["outputs"][0]["token_ids"], "no token was generated"
assert document["speculative"]["draft_acceptance_rate"] is not None, "nothing was drafted"
print(f"identical tokens, speedup {document['speedup']:.2f}, {document['outputs'][0]['text']!r}")
