"""Whether the Hub can be asked about a name: tried once, shortly and without a word.

huggingface_hub and datasets try five times, over half a minute, and tell it each time. They are called only when the
Hub answers.
"""

from __future__ import annotations

_SECONDS = 5.0


def why_no_hub(name: str, file: str, *, repo_type: str = "model") -> str | None:
    """Why nobody answers when asked for a file of this repository; None: there is an answer, whatever it is."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=repo_type), timeout=_SECONDS)
    except (errors.HfHubHTTPError, ValueError):
        return None
    except Exception as error:  # the network has error types of its own, which change with huggingface_hub
        return f"the Hub does not answer ({' '.join(str(error).split()) or type(error).__name__})"
    return None
