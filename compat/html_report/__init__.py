"""Reports as one HTML page each, which needs no network and contains no script."""

from compat.html_report.report import adapt_page, page_of, parity_page, table_page

__all__ = ["adapt_page", "page_of", "parity_page", "table_page"]
