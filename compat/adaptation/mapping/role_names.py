"""What names say of query, key and value; a hint where nothing else tells, or to be checked."""

from __future__ import annotations

import re

ROLES = {
    "q": re.compile(r"(^|[_.])(w?_?q|query|queries|to_?q|q_?proj|w_?query)([_.]|$)", re.I),
    "k": re.compile(r"(^|[_.])(w?_?k|key|keys|to_?k|k_?proj|w_?key)([_.]|$)", re.I),
    "v": re.compile(r"(^|[_.])(w?_?v|value|values|to_?v|v_?proj|w_?value)([_.]|$)", re.I),
}
