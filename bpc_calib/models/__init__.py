"""Models: describe them (`description`), load them (`loading`), observe their attention (`observation`)."""
