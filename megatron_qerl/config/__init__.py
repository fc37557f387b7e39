"""Configuration: ``schema`` says what exists, ``loader`` reads it, the rest makes mistakes easy to mend."""
