"""Engine to engine: expert calls and the experts themselves."""
