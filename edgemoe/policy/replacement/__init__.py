"""Which device of those that share a layer's experts has which one, where tokens go from device to device.

`traffic` has what experts are chosen one after the other, `relocate` places them by it, `published` as the source does,
`oracle` finds the optimum of small cases.
"""
