"""The `bpc` command: a file per command, which parses options, calls `bpc_calib` or `bpc_artifacts`, and prints."""
