"""The `bpc` command: one file a command; each parses, calls `bpc_calib` or `bpc_artifacts`, and prints."""
