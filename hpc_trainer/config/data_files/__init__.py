"""What data files say of themselves, as far as it is read at plan time: no torch."""
