"""What tests of several folders share: models, boxes, fakes, waiting."""
