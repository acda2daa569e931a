"""How experts move between tiers: links, the loader, the idle window."""
