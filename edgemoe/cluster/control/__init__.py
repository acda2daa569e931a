"""Who leads, who is a member, which plan holds. Runs in the front; imports no torch."""
