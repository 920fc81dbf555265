"""Batches from whatever the user has: tensors, arrays, datasets, loaders, folders of images."""
