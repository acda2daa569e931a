"""The learned expert predictor and its training (optional extra: train)."""
