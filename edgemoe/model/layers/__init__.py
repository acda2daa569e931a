"""The parts of a decoder layer, which the records of a model choose."""
