"""Which torch this package was built for."""

version = "0.1.0"
