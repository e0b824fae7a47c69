"""Converse of Amazon Bedrock: requests as they arrive, answers as they are sent."""
