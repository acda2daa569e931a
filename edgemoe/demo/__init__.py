"""The small Mixture-of-Experts model that ships with the package."""
