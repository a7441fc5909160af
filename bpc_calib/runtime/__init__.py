"""The decoding path: a transformers cache whose steps attend to the best-ranked tokens."""
