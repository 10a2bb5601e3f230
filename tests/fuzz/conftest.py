"""`--hypothesis-profile=long` runs twenty times as many examples."""

from hypothesis import settings

settings.register_profile("long", max_examples=2000)
