"""How a layer's experts are computed: here, beside a device, by peers."""
