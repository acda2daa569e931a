"""One generating request, from its settings to deltas, whichever endpoint asked."""
