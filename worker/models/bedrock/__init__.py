"""Amazon Bedrock's Converse.

Follows botocore's model of the service, 1.44 (API version 2023-09-30).
"""
