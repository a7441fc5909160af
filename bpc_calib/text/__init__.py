"""Text: corpora, samples of a fixed number of tokens, and text made from a seed."""
