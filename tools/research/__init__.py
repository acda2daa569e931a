"""Studies: compare the product with its sources' literal forms and with other methods, through the product's objects."""
