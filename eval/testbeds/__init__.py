"""Models whose joint law is known, so that what a sampler does to it can be measured by itself."""
