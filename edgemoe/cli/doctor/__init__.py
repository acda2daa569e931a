"""Examines this box and says what is wrong with it, and what to do: `edgemoe doctor`."""
