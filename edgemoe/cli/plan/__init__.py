"""Works out before a download whether a model fits, and how fast it will be: `edgemoe plan`."""
