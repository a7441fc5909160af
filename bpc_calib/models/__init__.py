"""Models: what they are (`description`), loading them (`loading`), watching their attention (`observation`)."""
