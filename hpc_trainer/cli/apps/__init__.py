"""Commands and their options, by purpose. No logic: each command imports what it needs when it is called."""
