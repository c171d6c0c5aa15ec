"""Where verbs find `looped_spec.atomic_json`."""

from looped_spec.atomic_json import check_target, json_text, write_json

__all__ = ["check_target", "json_text", "write_json"]
