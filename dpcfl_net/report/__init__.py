"""What a person sees of a run: reading its folder, the privacy statement in words, the report page."""
