"""What a step costs, for users."""
