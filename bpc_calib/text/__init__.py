"""Text: corpora, samples of a fixed number of tokens, and text generated from a seed."""
