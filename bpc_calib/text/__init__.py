"""Text: corpora, samples of a fixed number of tokens, and text generated from a seed.

Knows no model but a tokenizer. May import `errors` and `hub`.
"""
