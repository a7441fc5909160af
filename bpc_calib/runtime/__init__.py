"""The decoding path: a transformers cache whose decoding steps attend only to the best-ranked tokens."""
