"""What is made of what runs told of themselves: read models for every verb. No torch."""
