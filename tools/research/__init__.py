"""Studies that compare the product with its sources' literal forms and with other methods, using its own objects."""
