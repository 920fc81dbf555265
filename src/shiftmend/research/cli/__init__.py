"""Commands of a researcher: `bench`, `data`, `figure`."""
