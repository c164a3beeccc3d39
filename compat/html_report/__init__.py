"""What was found as one HTML page: for people, offline, without a script."""

from compat.html_report.report import adapt_page, parity_page

__all__ = ["adapt_page", "parity_page"]
