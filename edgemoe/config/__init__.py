"""Settings, how they are loaded, sizes as people write them, and the memory budgets that follow."""
