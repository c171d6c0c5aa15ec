"""The Nanbeige family (Nanbeige/Nanbeige4.2-3B) for looped-spec."""
