"""An autoregressive model as the target or the verifier of drafts."""
