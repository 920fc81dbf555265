"""`adapt` and `stream`: adapt a model to unlabelled data, all at once or batch by batch."""
