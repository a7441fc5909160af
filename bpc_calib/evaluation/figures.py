"""What is compared with full attention on plain text, and its short names in tables. Importing this file is cheap."""

__all__ = ["FIGURES"]

FIGURES = {
    "loss_difference": "loss", "kl": "KL", "recall": "recall", "mass": "mass", "best_kept": "best kept",
    "cosine": "cosine",
}  # fmt: skip
