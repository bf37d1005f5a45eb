"""What a step needs of a GPU's memory, found without one; `plan --memory` asks for it. No choice turns it on."""
