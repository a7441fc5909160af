"""Sharing artifacts on the Hub: the model card, and the upload."""
