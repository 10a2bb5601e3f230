"""Models with a known joint law, so that the error of a sampler can be measured apart from that of a model."""
