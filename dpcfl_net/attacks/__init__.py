"""What a server makes of what it recorded, and audits."""
