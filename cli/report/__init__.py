"""The page of `bpc inspect --html`: one self-contained HTML file, from an artifact's metadata and residuals."""
