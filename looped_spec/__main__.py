"""Lets `python -m looped_spec` stand for `looped-spec`."""

import sys

from looped_spec.cli.main import main

sys.exit(main())
