"""The calibration path: from a model and text to an artifact."""
