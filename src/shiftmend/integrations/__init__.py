"""Models and habits of other libraries: one file for each library, imported only by whoever uses it."""
