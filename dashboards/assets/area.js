// An area of the lanes: dragged over with Shift, on the time axis for all ranks, or between two clicks. While it is being
// placed the browser frames it; then the server does, and makes the table of what is in it.
window.overlapscope.areaOfLanes = ({lanes, axis, range, timeAt, positionAt, rowsAt, plot, placing}) => {
  const note = document.getElementById("ruler-note")
  const frame = document.createElement("div")
  frame.className = "frame"
  frame.hidden = true
  lanes.append(frame)
  let asked = 0
  let isPlaced = false
  const sorted = (first, last) => [Math.min(first, last), Math.max(first, last)]
  const lastPosition = () => plot.rows.data.rank.length - 2

  function edges(first, last) {
    const [from_ns, to_ns] = sorted(first.time, last.time)
    const [top, bottom] = sorted(first.position ?? 0, last.position ?? lastPosition())
    return {from_ns, to_ns, top, bottom}
  }

  function draw(first, last) {
    const {from_ns, to_ns, top, bottom} = edges(first, last)
    const [left, right] = [from_ns, to_ns].map((time) => (100 * (time - range.start)) / (range.end - range.start))
    const [y, end] = rowsAt(top, bottom)
    frame.hidden = false
    Object.assign(frame.style, {left: `${left}%`, width: `${right - left}%`, top: `${y}px`, height: `${end - y}px`})
    const count = bottom - top + 1
    note.textContent = count === 1 ? `rank ${plot.rows.data.rank[top]}` : `${count.toLocaleString("en-US")} ranks`
  }

  function ask(from_ns, to_ns, ranks) {
    plot.asked_area.data = {id: [(asked += 1)], from_ns: [from_ns], to_ns: [to_ns], ranks: [ranks]}
  }

  function place(first, last) {
    const {from_ns, to_ns, top, bottom} = edges(first, last)
    isPlaced = true
    const isAll = top === 0 && bottom === lastPosition()
    ask(from_ns, to_ns, isAll ? "" : plot.rows.data.rank.slice(top, bottom + 1).join(","))
    end()
  }

  function end() {
    frame.hidden = true
    note.textContent = ""
  }

  const common = {begins: ({shiftKey}) => shiftKey && !placing(), moved: draw, placed: place, stopped: end}
  const onLanes = window.overlapscope.twoPoints({
    element: lanes,
    pointAt: (event) => ({time: timeAt(event), position: positionAt(event)}),
    ...common,
  })
  const onAxis = window.overlapscope.twoPoints({element: axis, pointAt: (event) => ({time: timeAt(event)}), ...common})

  function begin() {
    onLanes.begin()
    note.textContent = "Drag over an area, or click two of its corners."
  }

  // Stops placing one; returns whether one was being placed.
  function stop() {
    const wasPlacing = onLanes.isPlacing() || onAxis.isPlacing()
    onLanes.stop()
    onAxis.stop()
    return wasPlacing
  }

  // Whether the response is to one that was placed, and not to one that the address had; call it once.
  function takePlaced() {
    const was = isPlaced
    isPlaced = false
    return was
  }

  const remove = () => (plot.asked_area.data = {id: [], from_ns: [], to_ns: [], ranks: []})

  return {begin, stop, ask, remove, takePlaced, isPlacing: () => onLanes.isPlacing() || onAxis.isPlacing()}
}

// Sorts the ranks of the table by the column that is clicked: the largest first, then the smallest, then as they were.
window.overlapscope.sortArea = (table, button) => {
  const column = button.closest("th").cellIndex
  const head = button.closest("th")
  const body = table.tBodies[table.tBodies.length - 1]
  const next = {descending: "ascending", ascending: null}[head.ariaSort] ?? (head.ariaSort ? null : "descending")
  for (const each of table.querySelectorAll("[aria-sort]")) each.removeAttribute("aria-sort")
  body.given ??= [...body.rows]
  const value = (row) => Number(row.cells[column].dataset.value)
  const direction = next === "descending" ? -1 : 1
  const rows = next ? [...body.given].sort((one, other) => direction * (value(one) - value(other))) : body.given
  if (next) head.ariaSort = next
  body.append(...rows)
}
