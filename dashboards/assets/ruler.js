// Ruler: two clicks or a drag while it is being placed. The server computes what lies between.
window.overlapscope.ruler = ({area, timeAt, rankAt, plot}) => {
  const DRAG_PX = 5
  const note = document.getElementById("ruler-note")
  let isPlacing = false
  let first = null
  let asked = 0
  let waiting = false
  let next = null

  function ask() {
    waiting = true
    asked += 1
    plot.measured.data = {id: [asked], from_ns: [first.time], to_ns: [next], rank: [first.rank]}
    next = null
  }

  function measureTo(event) {
    next = timeAt(event)
    if (!waiting) ask()
  }

  function answered() {
    const {id, text} = plot.ruler.data
    if (id[0] !== asked) return
    waiting = false
    note.textContent = text[0]
    if (next !== null) ask()
  }

  function setPlacing(is) {
    isPlacing = is
    area.classList.toggle("measuring", is)
  }

  function begin() {
    remove()
    setPlacing(true)
    note.textContent = "Click two points or drag."
  }

  // Removes the ruler; returns whether there was one.
  function remove() {
    const wasThere = isPlacing || first !== null
    setPlacing(false)
    first = next = null
    waiting = false
    asked += 1
    note.textContent = ""
    if (wasThere) plot.measured.data = {id: [], from_ns: [], to_ns: [], rank: []}
    return wasThere
  }

  const whilePlacing = (act) => (event) => {
    if (!isPlacing || event.button > 0) return
    event.stopPropagation() // it neither pans nor selects
    act(event)
  }

  area.addEventListener("pointerdown", whilePlacing((event) => {
    if (first) return
    first = {time: timeAt(event), rank: rankAt(event), x: event.clientX, isNew: true}
    measureTo(event)
  }), {capture: true})
  area.addEventListener("pointermove", (event) => {
    if (isPlacing && first) measureTo(event)
  }, {capture: true})
  area.addEventListener("pointerup", whilePlacing((event) => {
    if (!first) return
    measureTo(event)
    if (!first.isNew || Math.abs(event.clientX - first.x) > DRAG_PX) setPlacing(false)
    first.isNew = false
  }), {capture: true})
  plot.ruler.properties.data.change.connect(() => plot.ruler.data.id.length && answered())

  return {begin, remove, isPlacing: () => isPlacing}
}
